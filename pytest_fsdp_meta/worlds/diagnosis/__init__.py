"""Why a world hangs or a rank ended: stacks, and torch's flight recorder."""
