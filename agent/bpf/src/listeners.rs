//! Listening sockets, from the maps of the listener programs.

use super::KernelError;
use aya::maps::{HashMap, Map, MapData, MapError};
use beelet_ebpf_abi::{
    Address, AddressCount, FAMILY_IPV4, FAMILY_IPV6, ListenerRecord, MAX_LISTENERS, SocketCookie,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

/// A listening TCP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The kernel's number for the socket (`SO_COOKIE`).
    pub cookie: u64,
    /// The kernel's number for the socket's network namespace (`SO_NETNS_COOKIE`).
    pub netns_cookie: u64,
    /// 2 for IPv4, 10 for IPv6.
    pub family: u16,
    /// Bound address; unspecified (`0.0.0.0`, `::`) for every address.
    pub address: IpAddr,
    /// Bound port; 0 while unknown (a socket outside the pods' cgroup that listens without `bind`).
    pub port: u16,
    /// True for an IPv6 socket that also takes IPv4 connections.
    pub dual_stack: bool,
    /// Id (the inode of the directory) of the cgroup2 in which the socket was made; 0 if unknown.
    pub cgroup_id: u64,
    /// Time at which the socket began to listen: `CLOCK_MONOTONIC`, nanoseconds; 0 if not seen.
    pub since_ns: u64,
}

impl Listener {
    /// Converts the programs' record.
    pub(super) fn new(cookie: u64, address: &Address, cgroup_id: u64, since_ns: u64) -> Listener {
        let bytes = address.address;
        let ip = if address.family == FAMILY_IPV4 {
            IpAddr::V4(Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]))
        } else {
            IpAddr::V6(Ipv6Addr::from(bytes))
        };
        Listener {
            cookie,
            netns_cookie: address.netns_cookie,
            family: address.family,
            address: ip,
            port: address.port,
            dual_stack: address.dual_stack != 0,
            cgroup_id,
            since_ns,
        }
    }
}

/// Returns the keys under which a listener that answers at `ip:port` may be recorded, the most exact first.
pub(super) fn keys_for(netns_cookie: u64, ip: IpAddr, port: u16) -> Vec<Address> {
    let key = |address: [u8; 16], family: u16, dual_stack: u32| Address {
        netns_cookie,
        address,
        port,
        family,
        dual_stack,
    };
    match ip {
        IpAddr::V4(v4) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&v4.octets());
            let mapped = v4.to_ipv6_mapped().octets();
            vec![
                key(bytes, FAMILY_IPV4, 0),
                key([0; 16], FAMILY_IPV4, 0),
                key([0; 16], FAMILY_IPV6, 1),
                // An IPv6 socket bound to ::ffff:a.b.c.d takes only IPv4, with any value of IPV6_V6ONLY.
                key(mapped, FAMILY_IPV6, 1),
            ]
        }
        IpAddr::V6(v6) => {
            let bytes = v6.octets();
            let mut keys = Vec::with_capacity(4);
            for address in [bytes, [0; 16]] {
                for dual_stack in [1, 0] {
                    keys.push(key(address, FAMILY_IPV6, dual_stack));
                }
            }
            keys.dedup();
            keys
        }
    }
}

/// Reads the maps of the listener programs. Cheap to clone; never blocks.
#[derive(Clone, Debug)]
pub struct Listeners {
    maps: Arc<Maps>,
}

#[derive(Debug)]
struct Maps {
    listeners: HashMap<MapData, SocketCookie, ListenerRecord>,
    addresses: HashMap<MapData, Address, AddressCount>,
}

impl Listeners {
    pub(super) fn new(listeners: MapData, addresses: MapData) -> Result<Listeners, MapError> {
        let maps = Maps {
            listeners: HashMap::try_from(Map::from_map_data(listeners)?)?,
            addresses: HashMap::try_from(Map::from_map_data(addresses)?)?,
        };
        Ok(Listeners { maps: Arc::new(maps) })
    }

    /// Returns every listener that the programs know, in the order of their cookies.
    ///
    /// # Errors
    /// The kernel refused to read the map.
    pub fn snapshot(&self) -> Result<Vec<Listener>, KernelError> {
        let mut found = std::collections::BTreeMap::new();
        for entry in self.records()? {
            let (cookie, record) = entry;
            found.insert(cookie, Listener::new(cookie, &record.address, record.cgroup_id, record.since_ns));
        }
        Ok(found.into_values().collect())
    }

    /// Returns a listener in that network namespace that takes connections to `port` at any of `addresses`.
    ///
    /// A socket bound to every address counts, and so does an IPv6 socket that takes IPv4.
    ///
    /// # Errors
    /// The kernel refused to read a map.
    pub fn is_listening(
        &self,
        netns_cookie: u64,
        port: u16,
        addresses: &[IpAddr],
    ) -> Result<Option<Listener>, KernelError> {
        for ip in addresses {
            for key in keys_for(netns_cookie, *ip, port) {
                if let Some(count) = absent_is_none(self.maps.addresses.get(&key, 0), "ADDRESSES")?
                    && count.listeners > 0
                    && let Some(listener) = self.at(&key, count.last_cookie)?
                {
                    return Ok(Some(listener));
                }
            }
        }
        Ok(None)
    }

    /// Returns a listener at exactly `key`: the last one opened there, or a sibling if that one was closed.
    fn at(&self, key: &Address, last_cookie: u64) -> Result<Option<Listener>, KernelError> {
        let last = self.maps.listeners.get(&SocketCookie { cookie: last_cookie }, 0);
        if let Some(record) = absent_is_none(last, "LISTENERS")?
            && record.address == *key
        {
            return Ok(Some(Listener::new(last_cookie, key, record.cgroup_id, record.since_ns)));
        }
        let sibling = self.records()?.into_iter().find(|(_, record)| record.address == *key);
        Ok(sibling.map(|(cookie, record)| Listener::new(cookie, key, record.cgroup_id, record.since_ns)))
    }

    /// Returns all raw records. An entry may come twice if others are removed during the walk, because the
    /// kernel then starts over.
    pub(super) fn records(&self) -> Result<Vec<(u64, ListenerRecord)>, KernelError> {
        let mut records = Vec::new();
        for entry in &self.maps.listeners {
            let (key, record) = entry.map_err(|error| KernelError::map("LISTENERS", &error))?;
            records.push((key.cookie, record));
            if records.len() > 8 * MAX_LISTENERS {
                return Err(KernelError::new(
                    "the map LISTENERS changes faster than it can be read; it is read again at the next event",
                ));
            }
        }
        Ok(records)
    }
}

/// Maps a missing key to `None`.
pub(super) fn absent_is_none<T>(result: Result<T, MapError>, map: &str) -> Result<Option<T>, KernelError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(KernelError::map(map, &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_looked_up_under_every_key_that_answers_for_it() {
        let check = |ip: &str, expected: &[&str]| {
            let keys: Vec<String> = keys_for(7, ip.parse().unwrap(), 80)
                .iter()
                .map(|key| {
                    assert_eq!((key.netns_cookie, key.port), (7, 80));
                    let listener = Listener::new(1, key, 0, 0);
                    format!("{}{}", listener.address, if listener.dual_stack { " dual" } else { "" })
                })
                .collect();
            assert_eq!(keys, expected, "{ip}");
        };
        check("10.0.0.1", &["10.0.0.1", "0.0.0.0", ":: dual", "::ffff:10.0.0.1 dual"]);
        check("fd00::1", &["fd00::1 dual", "fd00::1", ":: dual", "::"]);
    }
}
