"""Changes to installed packages of others, made only when a person asks for them, and undone to the byte."""
