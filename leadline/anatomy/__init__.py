"""What a foreign model is made of, and how it is called."""
