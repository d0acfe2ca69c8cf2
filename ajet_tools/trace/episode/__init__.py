"""An episode prepared for display: messages, tree, overview, blocks of text."""
