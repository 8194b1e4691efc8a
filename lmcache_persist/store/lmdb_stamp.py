"""The stamp of a store: which binding its objects are of, and which one that replaced."""

from __future__ import annotations

from lmcache_persist import failpoints
from lmcache_persist.binding import Binding
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import check_replaced, check_stamp
from lmcache_persist.store.lmdb_errors import mapping_errors
from lmcache_persist.store.lmdb_transact import Transacts


class Stamps(Transacts):
    """The part of a disk tier on LMDB that stamps it."""

    _replaced: str
    _sweep_from: bytes | None

    def stamp(self) -> Binding | None:
        """See :meth:`DiskTier.stamp`."""
        return self._stamp

    def write_stamp(self, binding: Binding) -> None:
        """See :meth:`DiskTier.write_stamp`."""
        with self._writer, mapping_errors("the store cannot be stamped"):
            check_stamp(self._stamp, binding)
            if self._stamp is None:
                value = fmt.encode_meta(binding.to_json())
                with self._env.begin(write=True) as txn:
                    txn.put(fmt.META_STAMP, value, db=self._dbs.meta)
                if self.relaxed:
                    self._env.sync(True)
                self._stamp = binding
                self._reader.binding_id = binding.binding_id
            failpoints.hit("bind.after_stamp")

    def restamp(self, binding: Binding, *, replaces: str) -> None:
        """See :meth:`DiskTier.restamp`; :meth:`finish_rebind` takes the note back."""
        with self._writer, mapping_errors("the store cannot be stamped anew"):
            check_replaced(self._stamp, replaces)
            with self._env.begin(write=True) as txn:
                note = fmt.encode_meta({"replaced": replaces})
                txn.put(fmt.META_STAMP, fmt.encode_meta(binding.to_json()), db=self._dbs.meta)
                txn.put(fmt.META_REBIND, note, db=self._dbs.meta)
                failpoints.hit("rebind.before_stamp")
            self._env.sync(True)
            failpoints.hit("rebind.after_stamp")
            self._stamp, self._replaced = binding, replaces
            self._reader.binding_id = binding.binding_id
            self._sweep_from = b""

    def finish_rebind(self) -> None:
        """Forget which binding the stamp replaced: the manifest has followed.

        Durable: on return. Threads: writer only.

        Raises:
            StoreIOError: the disk failed; the note is still there, and harmless.
        """
        with self._writer, mapping_errors("the store cannot be changed"):
            if self._replaced:
                with self._env.begin(write=True) as txn:
                    txn.delete(fmt.META_REBIND, db=self._dbs.meta)
                self._env.sync(True)
                self._replaced = ""
