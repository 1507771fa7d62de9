"""task=serve: OpenAI's video API and a page over one Session. docs/serve.md says how it is used."""
