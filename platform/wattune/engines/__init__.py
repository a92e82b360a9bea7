"""What trains: one package an engine, strangers to each other, and the model they share."""
