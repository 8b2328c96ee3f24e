"""What every trainer needs: checkpoints, metric log, progress, schedules, image data."""
