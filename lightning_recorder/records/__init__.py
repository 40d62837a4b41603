"""Records: the statistics of sites as tables, their histograms, their form in a file, and their tags."""
