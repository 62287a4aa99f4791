"""What several figures share: entries, their storage, the page of results, nets and training."""
