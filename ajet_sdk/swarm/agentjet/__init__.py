"""AgentJet's swarm as a face of ours: its routes, its client, and what its programs import."""
