//! One error type a layer. Every variant carries the numbers, and its text says what was wanted,
//! what there was, and which setting to change.
//!
//! The errors of the verbs ([`CacheError`], [`DeviceError`]) own no heap memory: making one
//! allocates nothing, so a refused call keeps promise P1.

mod cache;
mod config;
mod device;
mod job;
#[cfg(feature = "model")]
mod model;
mod plan;
mod save;

pub use cache::{BatchRefused, CacheError, InvariantError};
pub use config::{ConfigError, Origin};
pub use device::DeviceError;
pub use job::{JobError, OpenError};
#[cfg(feature = "model")]
pub use model::ModelError;
pub use plan::PlanError;
pub use save::SaveError;
