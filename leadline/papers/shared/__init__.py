"""Common parts of several figures: entries, their storage, the page of results, nets and training."""
