"""Why a world hangs or a rank ended: stacks, torch's flight recorder, and full disks."""
