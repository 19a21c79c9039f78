"""Gateway: sessions of rollouts as HTTP endpoints with the APIs of OpenAI, Anthropic and Google."""
