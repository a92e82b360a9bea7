"""A folder for `PYTHONPATH`: nothing but a `sitecustomize`, so that it hides no module of the program."""
