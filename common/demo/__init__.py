"""`python -m boundedkv demo`: a small model reads real English through both backends at once, compared bit for bit."""
