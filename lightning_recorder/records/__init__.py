"""Records: the statistics of sites as tables, their histograms, their file format and their tags."""
