"""AMD devices through AMD SMI."""
