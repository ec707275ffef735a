"""What can be done or asked, each as one function: ``table.py`` has how one is declared, each noun its own module."""
