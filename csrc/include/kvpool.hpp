// kvpool for C++17: owners, spans and results over kvpool.h, which stays the contract.
//
//     auto config = kvpool::Config::load("serving.toml");
//     if (!config) return complain(config.error());
//     auto plan = kvpool::Plan::create(*config);
//     auto cache = kvpool::Cache::open(*plan);
//     auto begun = cache->begin(prompt);                              // a Sequence, which releases
//     auto step = cache->reserve({{begun->sequence, n}}, tokens);     // a Step, which cancels
//     step->append(layer, k, v); step->attend(layer, q, out); step->commit();
//
// RULES
//
// Errors. What can fail gives a Result<T>: a T, or an Error, which holds the status, the numbers, the setting
// to change and the message, in fixed buffers. (It is fetched by kvpool_last_error when a call has failed.)
// value(), * and -> of a failed Result end the program with its message; where KVPOOL_EXCEPTIONS is defined
// before the inclusion they throw kvpool::Exception. A program may have units of both kinds: the two are
// different types. Without KVPOOL_EXCEPTIONS the layer works with -fno-exceptions and -fno-rtti.
//
// Owners. Config, Plan, Cache, Sequence, Pin, Reservation and Step move and do not copy, and give back what
// they hold when they end; detach() gives the plain handle and ends the ownership. None refers to another:
// owners may move, and may end in any order (an owner that outlives its cache, or whose sequence was
// preempted, does nothing), on any thread and at any time: what an owner in a cache held that ends while a step is
// open or another thread is in the cache goes as soon as that is over ("Giving back later" in kvpool.h). That
// waits for nobody and makes no verb busy. (release(), unpin() and cancel() are verbs.) A Cache that ends beside
// another thread's verb waits for it, a second at most. What cannot be given back at all goes to the handler of
// set_leak_handler, by default a line on stderr: `handle` is what to give back in its place.
//
// Threads. As in kvpool.h. Its "any" and "reader" are here the const functions of Cache and Sequence, which
// every thread may call beside a verb; all others, those of Step included, are verbs, one at a time. An owner
// itself is an ordinary object: not to be moved or ended by one thread while another uses it. In the child of a
// fork nothing may be called but Cache::close; owners may end.
//
// Memory. Nothing here allocates but texts (std::string), Config::load and Config::parse, begin_batch of more
// than 64 sequences, and for a moment the making of an Error's message; below it, what kvpool.h names.
//
// Everything has its C handle or struct within reach: c() gives it.
#ifndef KVPOOL_HPP
#define KVPOOL_HPP

#if __cplusplus < 201703L && !(defined(_MSVC_LANG) && _MSVC_LANG >= 201703L)
#error "kvpool.hpp needs C++17; kvpool.h works with every C++ and C"
#endif

#include "kvpool/result.hpp"

#include "kvpool/values.hpp"

#include "kvpool/tensor.hpp"

#include "kvpool/owners.hpp"

#include "kvpool/cache.hpp"

#endif  // KVPOOL_HPP
