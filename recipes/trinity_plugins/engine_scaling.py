"""Trinity-RFT loads this file from ``--plugin-dir``; it puts the scaled loss where Trinity-RFT builds its own."""

import trinity_loss.trinity_rft

trinity_loss.trinity_rft.install()
