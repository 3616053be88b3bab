"""Quality of generated texts, alongside speed."""
