"""Trinity-RFT loads this file from ``--plugin-dir``; it lets Trinity-RFT 0.6.0 train with verl 0.9."""

import trinity_loss.trinity_verl_0_9

trinity_loss.trinity_verl_0_9.install()
