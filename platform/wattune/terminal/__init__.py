"""What people see in a terminal: tables, a study or a recording while it runs. Nothing here computes a figure."""
