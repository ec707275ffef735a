"""What a person types: a file for each noun."""
