"""Views for a terminal: tables, and a study or a recording while it runs. Nothing here computes a figure."""
