"""One image before any network: decoding, preprocessing, foreground, alignment."""
