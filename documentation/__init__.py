"""The documentation site: generated pages of docs/, and what MkDocs does with links out of it."""
