"""Finding what a model is best to leave out while it drafts."""
