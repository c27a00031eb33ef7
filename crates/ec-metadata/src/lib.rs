//! The metadata service: EC2 and OpenStack trees for guests.
