//! What those find who had to wait for a cache.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use super::object::{CACHES, call_back, reader, verb};
use super::tests::{begin, open, stats};
use super::*;

/// Long enough for another thread to begin to wait.
fn a_while() {
    thread::sleep(Duration::from_millis(30));
}

/// A reader that waited for a verb which met a panic does not read what that left.
#[test]
fn a_reader_that_waited_for_a_panic_is_told() {
    let cache = open();
    let inside = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let status = verb(cache, |_| {
                inside.wait();
                a_while();
                panic!("a panic that a test asked for")
            });
            assert_eq!(status, KVPOOL_PANIC);
        });
        inside.wait();
        assert_eq!(stats(cache), KVPOOL_POISONED);
    });
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
}

/// Nor does a verb that waited for a reader.
#[test]
fn a_verb_that_waited_for_a_panic_is_told() {
    let cache = open();
    let inside = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let status = reader(cache, |_| {
                inside.wait();
                a_while();
                panic!("a panic that a test asked for")
            });
            assert_eq!(status, KVPOOL_PANIC);
        });
        inside.wait();
        assert_eq!(begin(cache, &[1]).0, KVPOOL_POISONED);
    });
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
}

/// When a cache is closed nobody reads it any more.
#[test]
fn closing_waits_for_readers() {
    let cache = open();
    let (inside, done) = (Barrier::new(2), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let status = reader(cache, |_| {
                inside.wait();
                a_while();
                done.store(true, Ordering::Release);
                Ok(())
            });
            assert_eq!(status, KVPOOL_OK);
        });
        inside.wait();
        assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
        assert!(done.load(Ordering::Acquire), "the cache was closed under a reader");
    });
    assert_eq!(stats(cache), KVPOOL_STALE_HANDLE);
}

/// Nor does anybody have it: what it held, of which there may be only so much in the machine, is
/// free for the next one when `close` returns.
#[test]
fn closing_frees_the_cache_before_it_returns() {
    for _ in 0..100 {
        let cache = open();
        let object = Arc::downgrade(&CACHES.get(cache).expect("open"));
        let inside = Barrier::new(3);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    inside.wait();
                    while stats(cache) == KVPOOL_OK {}
                });
            }
            inside.wait();
            assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
            assert_eq!(object.strong_count(), 0, "somebody still has the cache");
        });
    }
}

/// What is given back while another thread reads waits for nobody, and is gone when that is over; what
/// is given back from within a callback goes behind it.
#[test]
fn what_is_given_back_later_waits_for_nobody() {
    let cache = open();
    let (status, begun) = begin(cache, &[1, 2, 3]);
    assert_eq!(status, KVPOOL_OK);
    let [inside, given] = [(); 2].map(|()| Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let status = reader(cache, |open| {
                inside.wait();
                given.wait();
                assert_eq!(open.cache.stats().seqs, 1, "not under a reader's hands");
                Ok(())
            });
            assert_eq!(status, KVPOOL_OK);
        });
        inside.wait();
        assert_eq!(kvpool_cache_release_later(cache, begun.sequence), KVPOOL_OK);
        given.wait();
    });
    // The reader did it on its way out: nobody has come since.
    let waits = || CACHES.get(cache).expect("open").keeps_for_later();
    assert!(!waits());
    assert_eq!(kvpool_cache_release(cache, begun.sequence), KVPOOL_STALE_HANDLE);
    // With nobody there it goes at once, whoever else gives back meanwhile.
    for _ in 0..200 {
        let [(_, a), (_, b)] = [(); 2].map(|()| begin(cache, &[1, 2, 3]));
        let both = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                both.wait();
                assert_eq!(kvpool_cache_release_later(cache, a.sequence), KVPOOL_OK);
            });
            both.wait();
            assert_eq!(kvpool_cache_release_later(cache, b.sequence), KVPOOL_OK);
        });
        assert!(!waits());
    }
    let (_, begun) = begin(cache, &[1, 2, 3]);
    let status = verb(cache, |_| {
        call_back(|| {
            assert_eq!(kvpool_cache_release_later(cache, begun.sequence), KVPOOL_OK);
            assert!(waits());
        });
        Ok(())
    });
    assert_eq!(status, KVPOOL_OK);
    assert!(!waits());
    assert_eq!(kvpool_cache_release(cache, begun.sequence), KVPOOL_STALE_HANDLE);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
    assert_eq!(kvpool_cache_release_later(cache, begun.sequence), KVPOOL_STALE_HANDLE);
}
