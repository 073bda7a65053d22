//! How each layer group takes part when sequences share a prefix.

use serde::Serialize;

use super::Limits;
use super::group::{GroupKind, LayerGroup};
use crate::config::Config;
use crate::units::GroupIdx;

/// The part of one layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupReuse {
    /// None: the plan shares no prefixes.
    Off,
    /// Paged without a window: the index is over its blocks.
    Index,
    /// Paged with a window: its blocks are attached to those of the index. A prefix is shared as
    /// far as the window behind it is still there.
    Attached,
    /// Contiguous: the prefix is copied from, or taken over with, the slot of a sequence that had
    /// the same tokens (a donor), alive or released. A ring only gives a prefix that ends near
    /// its latest token.
    Donor,
}

/// How a plan shares prefixes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReusePlan {
    /// The group that the prefix index is over: the paged layers without a window.
    pub lead: Option<GroupIdx>,
    /// The part of each group. `[num_groups]`
    pub groups: Vec<GroupReuse>,
    /// Why nothing is shared, when nothing is.
    pub declined: Option<&'static str>,
}

impl ReusePlan {
    /// Works out what the groups can do.
    pub(super) fn new(config: &Config, groups: &[LayerGroup]) -> Self {
        let off = |why| Self {
            lead: None,
            groups: vec![GroupReuse::Off; groups.len()],
            declined: Some(why),
        };
        if !config.cache.prefix_reuse {
            return off("cache.prefix_reuse is false");
        }
        let lead = groups.iter().position(|g| g.kind == GroupKind::Paged && g.window.is_none());
        let paged = groups.iter().any(|group| group.kind == GroupKind::Paged);
        if lead.is_none() && paged {
            return off(
                "all paged layers have a window, so no blocks hold a prefix from its first token on",
            );
        }
        let part = |(index, group): (usize, &LayerGroup)| match group.kind {
            GroupKind::Contiguous => GroupReuse::Donor,
            GroupKind::Paged if Some(index) == lead => GroupReuse::Index,
            GroupKind::Paged => GroupReuse::Attached,
        };
        Self {
            lead: lead.map(|index| GroupIdx(u32::try_from(index).unwrap_or(u32::MAX))),
            groups: groups.iter().enumerate().map(part).collect(),
            declined: None,
        }
    }

    /// Whether sequences share prefixes at all.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.declined.is_none()
    }

    /// Whether prefixes of some group come from donors.
    #[must_use]
    pub fn has_donors(&self) -> bool {
        self.groups.contains(&GroupReuse::Donor)
    }

    /// In words, for the plan's text.
    pub(super) fn words(&self) -> String {
        match self.declined {
            Some(why) => format!("not shared: {why}"),
            None if self.lead.is_none() => {
                "shared by copying from, or taking over, the slot of a sequence that begins alike; a fork copies its slot"
                    .to_owned()
            }
            None if self.has_donors() => {
                "blocks shared; contiguous layers copy from the slot of a sequence that begins alike, and a fork copies its slot"
                    .to_owned()
            }
            None => "blocks shared, copied on the first write that differs".to_owned(),
        }
    }
}

/// Pins that can be held at once.
pub(super) fn max_pins(limits: &Limits) -> u32 {
    limits.max_seqs.min(u32::from(u16::MAX))
}
