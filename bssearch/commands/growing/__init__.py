"""The best schedule of growing batches, for a training of one's own."""
