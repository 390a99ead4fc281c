"""Who steps the environments, who learns, and what stands between them."""
