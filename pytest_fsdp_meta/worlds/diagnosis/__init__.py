"""Why a world hangs or a rank ended: stacks, the flight recorder, disk and shared memory."""
