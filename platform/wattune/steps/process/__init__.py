"""Code that runs inside the user's process: the standard library alone, and no error of it reaches the program."""
