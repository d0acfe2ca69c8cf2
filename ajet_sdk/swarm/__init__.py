"""The swarm: episodes that run on other machines and train the model of a server here."""
