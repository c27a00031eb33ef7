//! The previous release's programs and this one's together. `scripts/upgrade-test.sh` builds the former, and says by
//! `EC_TEST_PREVIOUS` where they are.

mod mixtures;
mod side_by_side;
