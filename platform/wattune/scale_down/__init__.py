"""Scale-down: the small run that stands for a large one, how far it is from it, and how it is read as the large one."""
