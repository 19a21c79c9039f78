"""Who holds the conversation: the in-process chat loop or any Python callable."""
