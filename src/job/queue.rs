//! Who arrives when: the simulated clock, and the queue in front of a cache.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::workload::Request;

/// The requests that wait, those that are still to come, and the clock that they come by. Allocates
/// nothing after [`Queue::new`].
#[derive(Debug)]
pub(super) struct Queue<'a> {
    requests: &'a [Request],
    /// Which requests were not refused for ever. `[requests]`
    accepted: Vec<bool>,
    /// Which of them are forked from the one before them that is not, and do not come by
    /// themselves. `[requests]`
    forked: Vec<bool>,
    /// When each arrived. `[requests]`
    arrived_ns: Vec<u64>,
    pub(super) waiting: VecDeque<u32>,
    /// From here on, the first turns in the list belong to conversations that have not opened.
    unopened: usize,
    /// Conversations that are open, and how many may be.
    open: u32,
    most_open: Option<u32>,
    /// Whether other answers to a prompt come by themselves, and none is forked.
    forks_come: bool,
    /// Later turns that come when their time has come.
    later: BinaryHeap<Reverse<(u64, u32)>>,
    pub(super) now_ns: u64,
}

impl<'a> Queue<'a> {
    /// Nobody has arrived, and everybody counts as refused. Of conversations at most `most_open`
    /// are open at once, or all. With `forks_come` other answers to a prompt arrive with the first;
    /// without, whoever serves them lets them in with [`Queue::join`] or forks them.
    pub(super) fn new(requests: &'a [Request], most_open: Option<u32>, forks_come: bool) -> Self {
        let gaps = requests.iter().filter(|request| request.gap_ns > 0).count();
        Self {
            requests,
            accepted: vec![false; requests.len()],
            forked: vec![false; requests.len()],
            arrived_ns: vec![0; requests.len()],
            waiting: VecDeque::with_capacity(requests.len()),
            unopened: 0,
            open: 0,
            most_open,
            forks_come,
            later: BinaryHeap::with_capacity(gaps),
            now_ns: 0,
        }
    }

    /// Notes that a request can run. Requests are accepted in the order of the list: of the answers
    /// to a prompt the first that is comes by itself, and those behind it are its forks. Says
    /// whether it is the first.
    pub(super) fn accept(&mut self, index: usize) -> bool {
        let mut others = (1..=index).rev().take_while(|at| self.requests[*at].is_fork);
        let is_first = !others.any(|at| self.accepted[at - 1]);
        self.forked[index] = !self.forks_come && !is_first;
        self.accepted[index] = true;
        is_first
    }

    /// Whether a request is forked from one before it that can run.
    pub(super) fn is_forked(&self, index: u32) -> bool {
        self.forked[index as usize]
    }

    /// When a request arrived.
    pub(super) fn arrived_ns(&self, index: u32) -> u64 {
        self.arrived_ns[index as usize]
    }

    /// Moves the clock on.
    pub(super) fn pass(&mut self, ns: u64) {
        self.now_ns = self.now_ns.saturating_add(ns);
    }

    /// Puts everyone whose time has come into the queue, in the order of their times.
    pub(super) fn arrive(&mut self) {
        loop {
            let later = self.later.peek().map(|Reverse((at, _))| *at);
            let first = self.next_opening();
            match (first, later) {
                (Some(first), later)
                    if first <= self.now_ns && later.is_none_or(|at| first <= at) =>
                {
                    self.open_next();
                }
                (_, Some(later)) if later <= self.now_ns => {
                    let Some(Reverse((at, index))) = self.later.pop() else { break };
                    self.join(index, at);
                }
                _ => break,
            }
        }
    }

    /// Notes when a request arrived that does not wait.
    pub(super) fn note_arrival(&mut self, index: u32, at_ns: u64) {
        self.arrived_ns[index as usize] = at_ns;
    }

    /// Lets a request arrive.
    pub(super) fn join(&mut self, index: u32, at_ns: u64) {
        self.arrived_ns[index as usize] = at_ns;
        self.waiting.push_back(index);
    }

    /// Moves the clock to the next arrival, and lets it in; `false` when nobody comes any more.
    pub(super) fn wait_for_next(&mut self) -> bool {
        let later = self.later.peek().map(|Reverse((at, _))| *at);
        let Some(next) = [self.next_opening(), later].into_iter().flatten().min() else {
            return false;
        };
        self.now_ns = self.now_ns.max(next);
        self.arrive();
        true
    }

    /// When the next conversation that may open arrives; `None` when there is none left, or as
    /// many are open as may be.
    fn next_opening(&mut self) -> Option<u64> {
        if self.most_open.is_some_and(|most| self.open >= most) {
            return None;
        }
        let is_first = |&index: &usize| {
            self.requests[index].turn == 0 && !self.forked[index] && self.accepted[index]
        };
        self.unopened =
            (self.unopened..self.requests.len()).find(is_first).unwrap_or(self.requests.len());
        self.requests.get(self.unopened).map(|request| request.arrival_ns)
    }

    /// Lets the first turn of the next conversation arrive. Where conversations wait to be opened,
    /// nobody waits for them: they count from here.
    fn open_next(&mut self) {
        let first = self.unopened;
        self.unopened = first + 1;
        self.open += 1;
        let limited = self.most_open.is_some();
        let at_ns = if limited { self.now_ns } else { self.requests[first].arrival_ns };
        // A job of 2³² requests does not fit in memory.
        self.join(u32::try_from(first).unwrap_or(u32::MAX), at_ns);
    }

    /// Lets the turn behind a request that is done arrive, or else the next conversation.
    pub(super) fn arrive_after(&mut self, index: u32) {
        let next = index as usize + 1;
        let follows = self.requests.get(next).filter(|request| request.turn > 0);
        match follows.filter(|_| self.accepted[next]) {
            Some(turn) if turn.gap_ns == 0 => self.join(index + 1, self.now_ns),
            Some(turn) => {
                self.later.push(Reverse((self.now_ns.saturating_add(turn.gap_ns), index + 1)));
            }
            None => {
                self.open -= 1;
                self.arrive();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(turn: u32, arrival_ns: u64, gap_ns: u64) -> Request {
        Request { turn, arrival_ns, gap_ns, ..Request::default() }
    }

    fn queue<'a>(requests: &'a [Request], most_open: Option<u32>) -> Queue<'a> {
        let mut queue = Queue::new(requests, most_open, false);
        (0..requests.len()).for_each(|index| _ = queue.accept(index));
        queue
    }

    #[test]
    fn turns_come_after_their_gap_and_in_the_order_of_time() {
        let requests = [
            request(0, 0, 0),
            request(1, 0, 50),
            request(0, 20, 0),
            request(1, 0, 0),
            request(0, 70, 0),
        ];
        let mut queue = queue(&requests, None);
        queue.arrive();
        assert_eq!(queue.waiting.drain(..).collect::<Vec<_>>(), [0]);
        queue.pass(10);
        queue.arrive_after(0);
        assert!(queue.wait_for_next());
        assert_eq!((queue.now_ns, queue.waiting.pop_front()), (20, Some(2)));
        queue.pass(60);
        queue.arrive_after(2);
        assert_eq!(queue.waiting.pop_front(), Some(3), "no gap");
        queue.arrive();
        assert_eq!(queue.waiting.drain(..).collect::<Vec<_>>(), [1, 4]);
        assert_eq!([1, 3, 4].map(|index| queue.arrived_ns(index)), [60, 80, 70]);
        assert!(!queue.wait_for_next());
    }

    #[test]
    fn forks_come_only_where_they_are_not_forked() {
        let fork = Request { is_fork: true, ..request(0, 0, 0) };
        let requests = [request(0, 0, 0), fork, fork, request(0, 0, 0)];
        for (forks_come, expected) in [(false, &[0, 3][..]), (true, &[0, 1, 2, 3])] {
            let mut queue = Queue::new(&requests, None, forks_come);
            (0..4).for_each(|index| _ = queue.accept(index));
            queue.arrive();
            assert_eq!(queue.waiting, expected);
        }
    }

    #[test]
    fn where_the_first_answer_is_refused_the_next_one_is_forked() {
        let fork = Request { is_fork: true, ..request(0, 0, 0) };
        let requests = [request(0, 0, 0), fork, fork, fork, request(0, 0, 0), fork];
        let mut queue = Queue::new(&requests, None, false);
        assert_eq!([2, 3, 4, 5].map(|index| queue.accept(index)), [true, false, true, false]);
        queue.arrive();
        assert_eq!(queue.waiting, [2, 4]);
        assert_eq!([2, 3, 4, 5].map(|index| queue.is_forked(index)), [false, true, false, true]);
    }

    #[test]
    fn conversations_open_when_others_end_and_the_refused_never() {
        let requests = [request(0, 0, 0), request(0, 5, 0), request(0, 9, 0), request(1, 0, 3)];
        let mut queue = Queue::new(&requests, Some(1), false);
        [0, 2].into_iter().for_each(|index| _ = queue.accept(index));
        queue.arrive();
        assert_eq!(queue.waiting.pop_front(), Some(0));
        assert!(!queue.wait_for_next(), "one is open");
        queue.pass(30);
        queue.arrive_after(0);
        assert_eq!(queue.waiting.pop_front(), Some(2));
        assert_eq!(queue.arrived_ns(2), 30);
        queue.arrive_after(2);
        assert!(!queue.wait_for_next(), "its second turn was refused");
    }
}
