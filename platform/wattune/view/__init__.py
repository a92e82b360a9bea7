"""Views as data: tables of typed cells and notes, which a terminal, a page and Arrow render alike."""
