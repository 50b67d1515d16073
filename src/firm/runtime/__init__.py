"""What knows nothing of images: named random streams, files, the feature cache, the platform."""
