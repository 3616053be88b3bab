"""What is measured and learnt of one model on this machine."""
