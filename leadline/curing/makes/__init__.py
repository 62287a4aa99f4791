"""How each make of model is cured, a file or folder for each."""
