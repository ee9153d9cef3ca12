"""Pages: results of one run or two as a single HTML file, with pictures to zoom into, that needs no network."""
