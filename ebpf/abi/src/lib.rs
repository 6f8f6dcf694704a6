//! The records that both halves share.
#![no_std]
