"""Small jobs, clusters and timelines that tests of several packages use."""
