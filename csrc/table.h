// A hash table that only grows. Neither readers nor writers take a lock: a lookup costs little more than the hash, and
// a forked child cannot find a lock taken by a thread that it does not have.
#pragma once
#include <atomic>
#include <cstddef>
#include <functional>

namespace factorlayer {

template <class Key, class Value, class Hash = std::hash<Key>>
class Table {
 public:
  // Null if there is none. What is found stays where it is for the life of the process.
  Value* find(const Key& key) const {
    for (Node* node = bucket(key).load(std::memory_order_acquire); node; node = node->next)
      if (node->key == key) return &node->value;
    return nullptr;
  }

  // The value of the key, which is make() if there was none. Of two threads that come at once, one value is kept.
  template <class Make>
  Value& find_or_add(const Key& key, const Make& make) {
    if (Value* found = find(key)) return *found;
    Node* node = new Node{key, make(), nullptr};
    std::atomic<Node*>& head = bucket(key);
    for (Node* first = head.load(std::memory_order_acquire);;) {
      for (Node* other = first; other; other = other->next) {
        if (other->key == key) {
          delete node;
          return other->value;
        }
      }
      node->next = first;
      if (head.compare_exchange_weak(first, node, std::memory_order_acq_rel)) return node->value;
    }
  }

 private:
  struct Node {
    const Key key;
    Value value;
    Node* next;
  };
  static constexpr size_t size = 1024;

  std::atomic<Node*>& bucket(const Key& key) const { return buckets_[Hash()(key) % size]; }

  mutable std::atomic<Node*> buckets_[size] = {};
};

}  // namespace factorlayer
