"""One model in every form of its weights, quantised or with adapters: is the text the same? For docs/quantised.md."""
