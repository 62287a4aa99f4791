"""What several figures share: the form of an entry, its storage, its page, and the nets they measure."""
