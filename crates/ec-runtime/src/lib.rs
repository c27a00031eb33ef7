//! What every binary needs: configuration, logging, exit codes.
