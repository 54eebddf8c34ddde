"""What is made again or kept elsewhere to save memory."""
