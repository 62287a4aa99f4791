"""How each make of model is cured: a file or a folder for each make, and the registry of all."""
