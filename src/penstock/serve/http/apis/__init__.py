"""APIs beside OpenAI's chat and completions, a file each: their fields, and how they write answers."""
